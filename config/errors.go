package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
)

// Error is one error in a source.
//
// Where is for a person and an editor: FILE:LINE opens the right place. Problem ends with the
// allowed values or with the next step.
type Error struct {
	Where   string // FILE:LINE, a directory, a variable, or the origin of a flag
	Key     string // "" when it is about no key
	Problem string // what is wrong, and what to write instead

	quotes bool // Key or Problem holds text of a file
}

func (e *Error) Error() string {
	if e.Key == "" {
		return e.Where + ": " + e.Problem
	}
	return e.Where + ": " + e.Key + ": " + e.Problem
}

// Errors are all errors of a configuration; its text has one per line.
//
// They are in the order in which Load reads the sources, and within a file from top to bottom
// of each mapping, so that a person can fix them one after the other.
type Errors []error

// Unwrap lets errors.Is and errors.As find each one.
func (e Errors) Unwrap() []error { return e }

func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, err := range e {
		lines[i] = err.Error()
	}
	return strings.Join(lines, "\n")
}

// PublicText is the text of an error of Load for readers who may not have the right to read the
// files: it quotes nothing of a file that is not readable by everybody.
//
// A wrong value, and even a wrong key, may be a secret that was written into the wrong file, or the
// file itself may be the wrong one.
func PublicText(err error) string {
	var errs Errors
	if !errors.As(err, &errs) {
		return err.Error()
	}
	lines := make([]string, len(errs))
	for i, err := range errs {
		lines[i] = err.Error()
		var e *Error
		if !errors.As(err, &e) || !e.quotes {
			continue
		}
		if path, _, _ := strings.Cut(e.Where, ":"); isPublic(path) {
			continue
		}
		lines[i] = e.Where + notQuoted
	}
	return strings.Join(lines, "\n")
}

// notQuoted ends a line of PublicText that stands for one with a quote.
const notQuoted = ": is not valid; for more, as its owner: agentctl config validate"

// WithQuotes completes a PublicText with what this user may read of the files.
func WithQuotes(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		where, isHidden := strings.CutSuffix(line, notQuoted)
		if !isHidden {
			continue
		}
		path, _, _ := strings.Cut(where, ":")
		_, errs := ReadFile(path)
		for _, err := range errs {
			var e *Error
			if errors.As(err, &e) && e.Where == where && !slices.Contains(lines, err.Error()) {
				lines[i] = err.Error()
				break
			}
		}
	}
	return strings.Join(lines, "\n")
}

// isPublic reports whether everybody may read a file.
func isPublic(path string) bool {
	st, err := os.Stat(path)
	if err != nil || st.Mode().Perm()&0o004 == 0 {
		return false
	}
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		if st, err := os.Stat(dir); err != nil || st.Mode().Perm()&0o001 == 0 {
			return false
		}
		if dir == "/" || dir == "." {
			return true
		}
	}
}

// InFile reports whether err is about a file, and not about the environment or a flag.
//
// A command uses it for its exit code: a flag or a variable is wrong usage, a file is not.
// It relies on the absolute path that NewSource makes. An error that is not an *Error is one of
// reading a file or a directory.
func InFile(err error) bool {
	var errs Errors
	return errors.As(err, &errs) && slices.ContainsFunc(errs, func(err error) bool {
		var e *Error
		return !errors.As(err, &e) || strings.HasPrefix(e.Where, "/")
	})
}

// IsMissing reports whether ReadFile failed because there is no such file.
//
// ENOTDIR counts as well: a parent of the path is a file, so that the path cannot exist.
// Other errors, such as a lack of permission, do not: the file may exist and matter.
func IsMissing(errs Errors) bool {
	return len(errs) == 1 && (errors.Is(errs[0], fs.ErrNotExist) || errors.Is(errs[0], syscall.ENOTDIR))
}
