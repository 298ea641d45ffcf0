"""What a server of this API must do, as cases that look at it from outside, over the wire alone."""
