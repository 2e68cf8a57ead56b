package control

// Windows has no daemon; package client of a relay needs the types of this one only.

func isHungUp(uintptr) bool { return false }

func setMode(uintptr, uint32) {}

func tryLock(uintptr) (isBusy bool) { return false }
