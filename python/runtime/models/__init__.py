"""Model families, one file each, and the blocks they share."""
