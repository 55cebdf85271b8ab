"""Commands that run models, one file each, and what all commands share."""
