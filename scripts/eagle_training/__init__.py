"""The modules of `scripts/train_eagle.py`, which trains EAGLE-3 draft heads."""
