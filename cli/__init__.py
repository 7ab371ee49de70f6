"""Words and pixels: one file a command, no logic that the library lacks."""
