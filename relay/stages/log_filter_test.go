package stages_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"agentctl/relay/stages"
)

const (
	jwt = "eyJhbGciOiJFZERTQSJ9.eyJzdWIiOiJhbm4iLCJqdGkiOiJ4In0.c2lnbmF0dXJlLW9mLXRoZS10b2tlbg"
	pem = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIHVXbqkYsOIZ\nQw8rR1nEoKj0pSyiXvBLaZfN3u9gHUVX\n-----END PRIVATE KEY-----"
)

// fragments are parts of the secrets of these tests that must not be in any log.
var fragments = []string{"c2lnbmF0dXJl", "eyJzdWIi", "MC4CAQAw", "Qw8rR1nE", "hunter2", "swordfish"}

func wantNoSecret(t *testing.T, what, log string) {
	t.Helper()
	for _, f := range fragments {
		if strings.Contains(log, f) {
			t.Errorf("%s: %s is in %s", what, f, log)
		}
	}
}

// newLog is a filtered log in JSON, and what was written to it.
func newLog(t *testing.T) (*zap.Logger, *bytes.Buffer, *stages.Manager) {
	var out bytes.Buffer
	f := new(stages.LogFilter)
	log := f.Wrap(zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(&out), zapcore.InfoLevel)))
	_, m := newKernel(t, stages.Options{LogFilter: f})
	return log, &out, m
}

type object struct{ Password, Other string }

func (o object) MarshalLogObject(enc zapcore.ObjectEncoder) error {
	enc.AddString("password", o.Password)
	enc.AddString("other", o.Other)
	return nil
}

// TestLogFilter: no kind of message or field gets a secret past the log's core, whenever redact was
// enabled; what has no secret is written as before.
func TestLogFilter(t *testing.T) {
	fields := map[string]zap.Field{
		"string":    zap.String("a", "token "+jwt),
		"name":      zap.String("password", "hunter2"),
		"number":    zap.Int("token", 55512345),
		"bytes":     zap.ByteString("a", []byte("\xff\x00"+jwt+"\xfe")),
		"error":     zap.Error(fmt.Errorf("dial: %w", errors.New("bad password=hunter2, try again"))),
		"stringer":  zap.Stringer("a", stringer("secret: hunter2 swordfish")),
		"reflected": zap.Any("a", map[string]any{"deep": []any{map[string]string{"Authorization": "Bearer swordfish"}}}),
		"object":    zap.Object("a", object{"hunter2", jwt}),
		"inline":    zap.Inline(object{"hunter2", jwt}),
		"strings":   zap.Strings("a", []string{"x", jwt}),
		"document":  zap.String("a", `{"request":{"password":"hunter2"}}`),
		"text":      zap.String("a", `POST {"password": "hunter2", "n": 1} failed`),
		"escaped":   zap.String("a", `body "{\"password\":\"hunter2\"}"`),
		"header":    zap.String("a", "Authorization: Bearer swordfish"),
		"quoted":    zap.String("a", `password = 'hunter2 swordfish' user=ann`),
		"key":       zap.String("a", pem),
		"a name":    zap.Int("id "+jwt, 1),
		"duration":  zap.Duration("took", time.Second),
		"namespace": zap.Namespace("n"),
	}
	for name, f := range fields {
		t.Run(name, func(t *testing.T) {
			log, out, m := newLog(t)
			early := log.With(f)
			log.Info("plain", f)
			plain := out.String()
			enable(t, m, "redact", `{}`)
			out.Reset()
			log.Info("plain", f)
			switch name {
			case "duration", "namespace":
				if got := out.String(); stripTime(t, got) != stripTime(t, plain) {
					t.Errorf("a line without a secret: %s, before %s", got, plain)
				}
				return
			}
			early.Info("with")
			log.With(zap.Int("n", 7)).With(f).Error("with "+jwt, zap.String("b", "fine"))
			log.Warn("password: hunter2", f)
			got := out.String()
			wantNoSecret(t, name, got)
			if strings.Contains(got, "55512345") || strings.Count(got, "[redacted]") < 4 || strings.Count(got, "\n") != 4 || !strings.Contains(got, `"n":7`) || !strings.Contains(got, `"b":"fine"`) {
				t.Errorf("got %s", got)
			}
			for line := range strings.Lines(got) {
				if !json.Valid([]byte(line)) {
					t.Errorf("not JSON: %s", line)
				}
			}
			if err := m.Disable("redact", "global"); err != nil {
				t.Fatal(err)
			}
			out.Reset()
			if log.Info("plain", f); stripTime(t, out.String()) != stripTime(t, plain) {
				t.Errorf("off again: %s", out)
			}
		})
	}
}

func stripTime(t *testing.T, line string) string {
	t.Helper()
	var m map[string]json.RawMessage
	if err := json.Unmarshal([]byte(line), &m); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	delete(m, "ts")
	return string(encode(t, m))
}

type stringer string

func (s stringer) String() string { return string(s) }

// TestLogFilterKeepsText: what only looks like a secret stays readable.
func TestLogFilterKeepsText(t *testing.T) {
	f := new(stages.LogFilter)
	_, m := newKernel(t, stages.Options{LogFilter: f})
	enable(t, m, "redact", `{}`)
	for in, want := range map[string]string{
		"the token has expired":                     "the token has expired",
		"3 tokens were revoked":                     "3 tokens were revoked",
		"token_file /etc/x":                         "token_file /etc/x",
		"user=ann password=hunter2 host=x":          "user=ann password=[redacted] host=x",
		`{"password":"hunter2","n":1}`:              `{"password":"[redacted]","n":1}`,
		`password="[redacted]"`:                     `password="[redacted]"`,
		"password=[redacted]":                       "password=[redacted]",
		"api_key='a b' then":                        "api_key='[redacted]' then",
		"a " + jwt + " b":                           "a [redacted] b",
		"db_password: hunter2 swordfish\nnext line": "db_password: [redacted]\nnext line",
	} {
		if got := f.Clean(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
		if got := f.Clean(f.Clean(in)); got != want {
			t.Errorf("%q twice: %q", in, got)
		}
	}
}

// TestLineFilter: a secret in several lines of a stream is found, with lines that are not logged in
// between, and the lines after it are shown.
func TestLineFilter(t *testing.T) {
	log, _, m := newLog(t)
	newFilter := func() func(string, bool) string {
		return log.Core().(interface {
			LineFilter() func(string, bool) string
		}).LineFilter()
	}
	if got := newFilter()("password=hunter2", true); got != "password=hunter2" {
		t.Errorf("off: %s", got)
	}
	enable(t, m, "redact", `{}`)
	long := "-----BEGIN RSA PRIVATE KEY-----\n" + strings.Repeat(strings.Repeat("MC4CAQAwQw8rR1nE", 30)+"\n", 30) + "-----END RSA PRIVATE KEY-----"
	for name, tt := range map[string]struct {
		in    string
		skip  int // every so many lines is not logged
		shown string
	}{
		"plain":          {"one\ntwo", 0, "one|two"},
		"a JWT":          {"a " + jwt + "\nb", 0, "a [redacted]|b"},
		"binary":         {"\xff\xfe" + jwt + "\x00\nb", 0, "\xff\xfe[redacted]\x00|b"},
		"a key":          {"start\n" + pem + "\nend", 0, "start|[redacted]|[redacted]|[redacted]|[redacted]|end"},
		"a skipped line": {"start\n" + pem + "\nend", 3, "start|[redacted]||[redacted]|[redacted]|"},
		"a long key":     {long + "\nend", 0, strings.Repeat("[redacted]|", 32) + "end"},
		"over lines":     {"password:\n  hunter2\nnext", 0, "password:|  [redacted]|next"},
		"printed JSON":   {"{\n  \"password\": \"hunter2\",\n  \"user\": \"ann\"\n}", 0, "{|  \"password\": \"[redacted]\",|  \"user\": \"ann\"|}"},
	} {
		filter := newFilter()
		var shown []string
		for i, line := range strings.Split(tt.in, "\n") {
			isLogged := tt.skip == 0 || i%tt.skip != tt.skip-1
			if got := filter(line, isLogged); isLogged {
				shown = append(shown, got)
			} else {
				shown = append(shown, "")
			}
		}
		got := strings.Join(shown, "|")
		if wantNoSecret(t, name, got); got != tt.shown {
			t.Errorf("%s: %.300q, want %.300q", name, got, tt.shown)
		}
	}
}

// TestLogFilterOffCostsNothing: redaction that is off adds no allocation to a line.
func TestLogFilterOffCostsNothing(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector makes sync.Pool drop objects by chance; make test-slow counts without it")
	}
	discard := zap.New(zapcore.NewCore(zapcore.NewJSONEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(discardWriter{}), zapcore.InfoLevel))
	filtered := new(stages.LogFilter).Wrap(discard)
	count := func(log *zap.Logger) float64 {
		return testing.AllocsPerRun(200, func() { log.Info("a", zap.String("b", "c")) })
	}
	if plain, got := count(discard), count(filtered); got > plain {
		t.Errorf("%g allocations a line, without the filter %g", got, plain)
	}
}

type discardWriter struct{}

func (discardWriter) Write(b []byte) (int, error) { return len(b), nil }
