"""Recipes that make draft models: EAGLE-3 heads, distilled drafts, and copies with ballast."""
