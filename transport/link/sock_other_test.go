//go:build !linux

package link

func hasUserTimeout(*wsConn) bool { return true }
