"""One file a command; cli/main.py has the table."""
