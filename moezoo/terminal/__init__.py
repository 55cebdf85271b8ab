"""What commands print: tables as lines of text, and progress while something runs."""
