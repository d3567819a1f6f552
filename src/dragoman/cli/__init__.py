"""The command line: `main.py` holds the table of verbs, and each verb has a file of its own."""
