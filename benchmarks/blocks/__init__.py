"""The numbers of the pages, one file per page or two; every public function makes the block of its name.

``text`` holds what they share and makes no block.
"""
