package enroll

import (
	"errors"
	"path/filepath"
	"strings"

	"agentctl/enrollment"
	"agentctl/transport/pin"
)

// JoinLine is the content of a join file: what a board needs to join a relay by itself.
type JoinLine struct {
	Relay    string // URL
	Code     string // canonical
	CASHA256 string // "": none
}

// errJoinLine says what a join file has to hold. It quotes nothing: the file holds a secret.
var errJoinLine = errors.New("not a join line: write URL CODE [--ca-sha256 HEX] in one line, as an invite prints it after `agentctl join`")

// ParseJoinLine reads `URL CODE [--ca-sha256 HEX]`. Blank lines around it are ignored.
func ParseJoinLine(text string) (l JoinLine, err error) {
	words := strings.Fields(text)
	if strings.Contains(strings.TrimSpace(text), "\n") || len(words) != 2 && len(words) != 4 {
		return JoinLine{}, errJoinLine
	}
	if len(words) == 4 {
		if words[2] != "--ca-sha256" {
			return JoinLine{}, errJoinLine
		}
		p, err := pin.Parse(strings.ToLower(words[3]))
		if err != nil {
			return JoinLine{}, err
		}
		l.CASHA256 = p.String()
	}
	if l.Code, err = enrollment.ParseCode(words[1]); err != nil {
		return JoinLine{}, err
	}
	if l.Relay, err = BaseURL(words[0]); err != nil {
		return JoinLine{}, err
	}
	return l, nil
}

// HasLeft reports whether the last Leave was from a relay that was joined with this canonical
// code: a join file that remains must not undo it. A record that is damaged, or does not know the
// code, counts as one of any code, since there is one only on a board that has left.
func HasLeft(stateDir, code string) bool {
	var l left
	var damaged *DamagedError
	err := loadJSON(filepath.Join(stateDir, leftFile), &l)
	return err == nil && (l.CodeSHA256 == "" || l.CodeSHA256 == enrollment.HashCode(code)) || errors.As(err, &damaged)
}
