"""The tasks besides classification: one Lightning module each, their losses, and the table."""
