"""What a person looks at besides the list of sites, as data: operators, what masks leave, how much experts compute."""
