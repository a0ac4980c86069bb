"""The draft room: drafting, verification and acceptance."""
