"""Figures and pages, made from stored reports alone: nothing here needs a model."""
