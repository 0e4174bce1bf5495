"""The paper's theory in float64; imports nothing of the package."""
