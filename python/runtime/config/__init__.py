"""What the user asked for, and what the server decided."""
