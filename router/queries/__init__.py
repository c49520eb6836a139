"""The index for other people's routers: who holds a prompt, asked in the forms that they know. Nothing here changes it."""
