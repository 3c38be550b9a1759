"""The lab's vocabulary, the recall task, and prompts whose every position is known."""
