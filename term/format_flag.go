package term

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// FormatFlag is the value of a flag that chooses an output format, such as -o. It has the
// methods of flag.Value and pflag.Value. FormatFlag and JSONFlag may share one Format: flags
// that contradict each other are an error, whatever their order.
type FormatFlag struct {
	Format  *string  // the format that was given; "" is text
	Allowed []string // with one format, the command prints a stream
}

// String returns the format. The zero value has none: pflag compares with one.
func (f *FormatFlag) String() string {
	if f.Format == nil {
		return ""
	}
	return *f.Format
}

// Type is the kind of value that help shows.
func (f *FormatFlag) Type() string { return "string" }

// Set checks and stores a format.
func (f *FormatFlag) Set(s string) error {
	last := len(f.Allowed) - 1
	switch {
	case !slices.Contains(f.Allowed, s) && last == 0:
		return errors.New("it streams: use -o " + f.Allowed[0])
	case !slices.Contains(f.Allowed, s):
		return fmt.Errorf("the formats are %s and %s", strings.Join(f.Allowed[:last], ", "), f.Allowed[last])
	case *f.Format != "" && *f.Format != s:
		return fmt.Errorf("it contradicts %s, which was given before", *f.Format)
	}
	*f.Format = s
	return nil
}

// JSONFlag is the value of --json, a boolean flag that is short for the format json.
type JSONFlag struct{ Format *string }

// String is empty: the flag has no default that help should show.
func (f *JSONFlag) String() string { return "" }

// Type is the kind of value that help shows.
func (f *JSONFlag) Type() string { return "bool" }

// Set chooses json, unless s is false.
func (f *JSONFlag) Set(s string) error {
	on, err := strconv.ParseBool(s)
	if err != nil || !on {
		return err
	}
	return (&FormatFlag{f.Format, []string{"json"}}).Set("json")
}
