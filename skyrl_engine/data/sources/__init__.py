"""Read rows from files, folders and hubs, and recognise what they hold."""
