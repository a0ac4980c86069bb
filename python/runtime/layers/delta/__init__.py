"""Linear attention by the gated delta rule, with a recurrent state in place of keys and values."""
