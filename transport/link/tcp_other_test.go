//go:build !linux

package link

func hasUserTimeout(Conn) bool { return true }
