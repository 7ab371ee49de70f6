"""Other people's layouts: one file a format, bytes in and records out."""
