"""From requests to prompts: the fleet's models, requests read in their scopes, and where prompts are looked up."""
