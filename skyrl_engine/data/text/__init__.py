"""Render chats and turn text into tokens."""
