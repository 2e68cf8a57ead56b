package cli

import (
	"strconv"
	"time"
)

// Set by the linker flags -X of the Makefile.
var (
	// Version is that of the release or the commit; a plain `go build` says devel.
	Version = "devel"
	// BuiltAt is the time of the commit, in seconds since 1970; BuildTime parses it.
	BuiltAt = "0"
	// Stamp is the version and the commit's time in a form that can be found in a binary: a running
	// daemon reads it from a staged binary.
	Stamp = ""
)

// BuildTime is the time of the commit that the binary was built from, zero if it is not known. It is the
// earliest time that can be right: a relay whose clock is before it serves no boards (relay --accept-clock).
func BuildTime() time.Time {
	s, err := strconv.ParseInt(BuiltAt, 10, 64)
	if err != nil || s <= 0 {
		return time.Time{}
	}
	return time.Unix(s, 0)
}
