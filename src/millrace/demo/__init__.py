"""The scenario behind `millrace demo`: sample producers, pipelines on what they write, an account at the end."""
