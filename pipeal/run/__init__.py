"""What a command does, without the command line."""
