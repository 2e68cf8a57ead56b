package control

import (
	"errors"
	"testing"

	"agentctl/manifest"
)

// An error of several lines, such as the problems of a manifest, arrives on one line.
func TestCallerErrorIsOneLine(t *testing.T) {
	tests := map[string]string{
		"not valid:\n  name: too long\n  tools[0]: no name": "not valid: name: too long; tools[0]: no name",
		"a\nb":  "a?b",
		"a\x1b": "a?",
	}
	for text, want := range tests {
		var e *manifest.Error
		if err := callerError(errors.New(text)); !errors.As(err, &e) || e.Message != want {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}
