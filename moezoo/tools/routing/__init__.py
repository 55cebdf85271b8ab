"""To which experts the tokens of a text go."""
