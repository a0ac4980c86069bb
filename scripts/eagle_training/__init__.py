"""Training of EAGLE-3 draft heads: the parts of `scripts/train_eagle.py`."""
