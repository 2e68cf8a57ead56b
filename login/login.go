// Package login keeps the credentials of an agent or a person: one context for each relay that
// was logged in to.
//
//	store := login.Store{Dir: dir}
//	err := store.Login(ctx, login.Options{Context: "lab", Relay: url, Code: code})
//	c, err := store.Open("") // the current context
//	token, err := c.Token(ctx, "")
//
// A context is a file of mode 0600 with the relay's URL and pin, an Ed25519 key and the token
// that was made with it last. The key is the identity. Tokens live for an hour; Token refreshes
// them with the key, under a lock, because several processes share a context.
//
//	login.go     Login: a code for an identity
//	context.go   Context: the token of an identity, refreshed when it is due
//	store.go     the files of a directory
//	lock_*.go    the lock between processes
//
// The files of Store.Dir:
//
//	NAME.json        a context
//	NAME.pending     the key of a login that has not ended; a secret like the one of a context
//	NAME.json.lock   empty, on Windows only
//	current          the name of the current context
//
// Boards do the same with package transport/enroll, whose client is used here too. They differ in that
// a board's daemon is the only process that refreshes its token, and refreshes it before it is needed; here
// many short processes share one, and refresh it when they need it.
package login

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"agentctl/atomicfile"
	"agentctl/config"
	"agentctl/enrollment"
	"agentctl/strictjson"
	"agentctl/transport/enroll"
	"agentctl/transport/link"
)

// DefaultName is the name of a context that was not given one.
const DefaultName = "default"

// Names of files in Store.Dir.
const (
	suffix        = ".json"
	pendingSuffix = ".pending" // the key of a Login whose answer has not been stored
	currentFile   = "current"  // the name of the current context
)

// Errors that callers test with errors.Is.
var (
	// ErrNoContext reports a context that does not exist, or that none is current.
	ErrNoContext = errors.New("no such context")
	// ErrForBoard reports a code of an invite for boards. It is used up.
	ErrForBoard = errors.New("the code was for a board and not for an agent, and is used up now")
	// ErrCleartextPin reports a pin with a URL that does not use TLS.
	ErrCleartextPin = errors.New("a pin needs https://, because without TLS there is no authority to check")
)

// OtherRelayError refuses to replace a context of another relay.
type OtherRelayError struct{ Name, Relay string }

func (e *OtherRelayError) Error() string {
	return fmt.Sprintf("context %s is for another relay, %s", e.Name, e.Relay)
}

// FileError reports a file that cannot be used or stored. Nothing is half written.
type FileError struct {
	Path string
	Err  error // fs.ErrPermission, syscall.ENOSPC …; ErrDamaged or ErrOpen
}

func (e *FileError) Error() string { return e.Path + ": " + e.Err.Error() }

// Unwrap returns the cause.
func (e *FileError) Unwrap() error { return e.Err }

// Reasons of a FileError beyond those of the file system.
var (
	ErrDamaged = errors.New("the file is damaged")
	ErrOpen    = errors.New("other users can read this file, which holds a key")
)

// pending is the content of a pending file. The relay and the hash of the code say which login the key is
// for: with another code or relay it would be a second identity with one key.
type pending struct {
	Relay      string `json:"relay"`
	CodeSHA256 string `json:"code_sha256"`
	PrivateKey string `json:"private_key"`
}

// Options of a login.
type Options struct {
	Context  string // name; "": DefaultName
	Relay    string // URL, as people write it
	CASHA256 string // pin of the relay's own authority; "": none
	Code     string // as people write it
	Version  string // of this binary
	CAFile   string // absolute path of the authority's certificate, in place of a pin; "": none
}

// Login exchanges a code for an identity, stores it as a context and makes that the current
// one. before is the context that was current, "" for none. Login may be repeated after any
// error, and after a success: the same code gives the same identity as long as its key, which is
// stored first, is there. Its errors are OtherRelayError, FileError, *enroll.Error, ErrForBoard, those of the
// URL, the pin and the code, and ctx's.
func (s Store) Login(ctx context.Context, o Options) (_ *Info, before string, err error) {
	name := o.Context
	if name == "" {
		name = DefaultName
	}
	if err := CheckName(name); err != nil {
		return nil, "", err
	}
	code, err := enrollment.ParseCode(o.Code)
	if err != nil {
		return nil, "", err
	}
	base, err := enroll.BaseURL(o.Relay)
	if err != nil {
		return nil, "", err
	}
	o.CASHA256 = strings.ToLower(o.CASHA256)
	if o.CASHA256 != "" && !strings.HasPrefix(base, "https:") {
		return nil, "", ErrCleartextPin
	}
	client := enroll.Client{URL: base}
	if client.TLS, err = config.ClientTLS(o.CAFile, o.CASHA256); err != nil {
		return nil, "", err
	}
	// A refresh by another process must not put the old identity back. A context that does not exist has no
	// file to lock: of two logins that make it at the same time the later one wins.
	release, err := lockFile(ctx, s.path(name))
	switch {
	case err == nil:
		defer release()
	case !errors.Is(err, fs.ErrNotExist):
		return nil, "", err
	}
	// An error of load is left out: a login is how a damaged context is replaced.
	old, err := s.load(name)
	if err == nil && old.Relay != base {
		return nil, "", &OtherRelayError{name, old.Relay}
	}
	if err := atomicfile.MkdirAll(s.Dir, 0o700); err != nil {
		return nil, "", &FileError{s.Dir, err}
	}
	if before, err = s.Current(); err != nil {
		return nil, "", &FileError{filepath.Join(s.Dir, currentFile), err}
	}
	// The key is stored before anything is sent: a full disk is noticed before the code is used,
	// and the answer to a code whose answer was lost can be asked for again.
	codeSHA256 := enrollment.HashCode(code)
	key, err := s.keyFor(name, base, codeSHA256, old)
	if err != nil {
		return nil, before, err
	}
	answer, err := client.EnrollRepeatedly(ctx, enroll.EnrollOptions{
		Code: code, InstanceID: instanceID(key), Version: o.Version,
		Key: func() (ed25519.PrivateKey, error) { return key, nil },
	})
	if err != nil {
		if isCodeRefused(err) {
			_ = atomicfile.Remove(filepath.Join(s.Dir, name+pendingSuffix))
		}
		return nil, before, err
	}
	if answer.AgentID == "" {
		_ = atomicfile.Remove(filepath.Join(s.Dir, name+pendingSuffix))
		return nil, before, ErrForBoard
	}
	c := &credential{
		Relay: base, CASHA256: o.CASHA256, CAFile: o.CAFile, AgentID: answer.AgentID, TenantID: answer.TenantID, PrivateKey: enrollment.EncodePrivateKey(key),
		Token: answer.Token, Gen: answer.Gen, ExpiresAtMS: answer.ExpiresAtMS, ReceivedMS: nowMS(), RequestID: link.NewID(),
		CodeSHA256: codeSHA256,
	}
	if err := save(s.path(name), c); err != nil {
		return nil, before, err
	}
	_ = atomicfile.Remove(filepath.Join(s.Dir, name+pendingSuffix)) // a leftover is replaced by the next login
	i := &Info{name, true, c.Relay, c.CASHA256, c.AgentID, c.TenantID, c.ExpiresAtMS, ""}
	return i, before, s.Use(name)
}

// isCodeRefused reports a refusal that says that the key of the login has no identity: a key that
// has one gets it again. Another error may be that of an answer that was lost, after which only the
// stored key gets the identity that the relay has made.
func isCodeRefused(err error) bool {
	var e *enroll.Error
	return errors.As(err, &e) && e.Kind == enroll.Refused && slices.Contains([]string{
		enrollment.ReasonCodeUnknown, enrollment.ReasonUsed, enrollment.ReasonExpired, enrollment.ReasonRevoked}, e.Reason)
}

// keyFor returns the key of a login: that of the context or of an earlier attempt with the same
// code, or a new one, which it stores. old is the context as it is, nil if it cannot be used.
func (s Store) keyFor(name, relay, codeSHA256 string, old *credential) (ed25519.PrivateKey, error) {
	if old != nil && old.CodeSHA256 == codeSHA256 {
		return enrollment.ParsePrivateKey(old.PrivateKey)
	}
	path := filepath.Join(s.Dir, name+pendingSuffix)
	var p pending
	if b, err := readPrivate(path); err == nil && strictjson.Unmarshal(b, &p) == nil && p.Relay == relay && p.CodeSHA256 == codeSHA256 {
		if key, err := enrollment.ParsePrivateKey(p.PrivateKey); err == nil {
			return key, nil
		}
	} // of another code, or damaged: no answer to it is of use
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, err
	}
	return key, save(path, &pending{relay, codeSHA256, enrollment.EncodePrivateKey(key)})
}

// instanceID identifies this login in the enrollment: 128 bits in hex, as a board has it. It follows from
// the key, so that a repeat has the same one.
func instanceID(key ed25519.PrivateKey) string {
	sum := sha256.Sum256(key.Public().(ed25519.PublicKey))
	return hex.EncodeToString(sum[:16])
}
