"""What a model and its cache need: bytes, capacity, operations, time. Computed before anything is loaded."""
