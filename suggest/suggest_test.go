package suggest_test

import (
	"fmt"
	"strings"
	"testing"

	"agentctl/suggest"
)

func Example() {
	fmt.Printf("unknown key %q%s\n", "nmae", suggest.Hint("nmae", []string{"name", "relay"}))
	// Output: unknown key "nmae", did you mean "name"?
}

func TestNearest(t *testing.T) {
	words := []string{"name", "relay", "base_interval_ms", "cpu", "socket", "token_file", "history.flush"}
	tests := []struct{ word, want string }{
		{"nmae", "name"},
		{"relais", "relay"},
		{"base_interval", "base_interval_ms"},
		{"BASE_INTERVAL_MS", "base_interval_ms"},
		{"token", "token_file"},
		{"flush", "history.flush"},
		{"zzz", ""},
		{"x", ""},
		{strings.Repeat("n", 1000), ""},
	}
	for _, tt := range tests {
		if got := suggest.Nearest(tt.word, words); got != tt.want {
			t.Errorf("Nearest(%.20q) = %q, want %q", tt.word, got, tt.want)
		}
	}
}
