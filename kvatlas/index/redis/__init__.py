"""The residency index in Redis or Valkey."""
