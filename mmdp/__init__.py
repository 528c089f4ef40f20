"""mmdp."""
