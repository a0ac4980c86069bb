"""The processes that talk over ZMQ: tokenizer manager, scheduler, detokenizer manager. No torch."""
