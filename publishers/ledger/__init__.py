"""What one engine holds, and the change of it that is published."""
