"""Everything that differs between operating systems and machines; knows no formats."""
