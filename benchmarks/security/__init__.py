"""What protection costs, and what attacks can cost others."""
