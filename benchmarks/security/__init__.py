"""The cost of protection, and what attacks can cost others."""
