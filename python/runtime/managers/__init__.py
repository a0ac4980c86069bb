"""The processes that exchange messages over ZMQ: tokenizer manager, scheduler, detokenizer manager. No torch."""
