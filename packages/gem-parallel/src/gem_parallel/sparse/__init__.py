"""Tables spread over ranks."""
