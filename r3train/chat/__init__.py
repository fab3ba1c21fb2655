"""Chat as harnesses speak it: requests read, answers written, messages compared."""
