"""What differs between operating systems and machines; nothing here is about formats."""
