"""Files and folders that may come from somebody else: their listing, archives, JSON, and the names of splits."""
