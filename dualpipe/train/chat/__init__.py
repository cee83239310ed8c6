"""Conversations: their forms in records, chat templates, and the text of the assistant's turns.

Imports nothing.
"""
