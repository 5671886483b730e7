check_pages() { :; }
