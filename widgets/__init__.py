"""How a run looks: what the launcher knows of it, as static HTML and as text. Starts nothing and asks nobody."""
