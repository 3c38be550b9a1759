"""phase-jax: a laboratory for the phase sensitivity of chunked KV-cache compression."""
