// Transactions with franz-go: a bootstrap address, a scene, a number of records, and names of topics.
//
//	ended COUNT TOPIC          three transactions on one topic: committed, aborted, committed
//	fenced COUNT TOPIC         a second producer takes the transactional id of the first
//	copied COUNT SOURCE TARGET a group copies SOURCE exactly once; every third step is aborted
//
// Then a reader of committed records prints the first COUNT of the last topic, one value per line, ordered by
// partition. Ends with 1 and a reason when something is not as it should be, at the latest after a minute.
package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"time"

	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const limit = time.Minute

func main() {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	bootstrap, scene, topics := os.Args[1], os.Args[2], os.Args[4:]
	count, err := strconv.Atoi(os.Args[3])
	if err == nil {
		switch scene {
		case "ended":
			err = ended(ctx, bootstrap, topics[0])
		case "fenced":
			err = fenced(ctx, bootstrap, topics[0])
		case "copied":
			err = copied(ctx, bootstrap, topics[0], topics[1], count)
		default:
			err = fmt.Errorf("no scene %q", scene)
		}
	}
	if err == nil {
		err = show(ctx, bootstrap, topics[len(topics)-1], count)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func producer(bootstrap, topic string) (*kgo.Client, error) {
	return kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.TransactionalID(topic+"-id"),
		kgo.DefaultProduceTopic(topic),
		kgo.RetryTimeout(limit),
	)
}

func step(ctx context.Context, client *kgo.Client, word string, end kgo.TransactionEndTry) error {
	if err := client.BeginTransaction(); err != nil {
		return err
	}
	for number := range 3 {
		record := kgo.StringRecord(fmt.Sprintf("%s-%d", word, number))
		if err := client.ProduceSync(ctx, record).FirstErr(); err != nil {
			return fmt.Errorf("%s: %w", word, err)
		}
	}
	return client.EndTransaction(ctx, end)
}

func ended(ctx context.Context, bootstrap, topic string) error {
	client, err := producer(bootstrap, topic)
	if err != nil {
		return err
	}
	defer client.Close()
	return errors.Join(
		step(ctx, client, "kept", kgo.TryCommit),
		step(ctx, client, "gone", kgo.TryAbort),
		step(ctx, client, "last", kgo.TryCommit),
	)
}

func fenced(ctx context.Context, bootstrap, topic string) error {
	first, err := producer(bootstrap, topic)
	if err != nil {
		return err
	}
	defer first.Close()
	second, err := producer(bootstrap, topic)
	if err != nil {
		return err
	}
	defer second.Close()
	if err := step(ctx, first, "before", kgo.TryCommit); err != nil {
		return err
	}
	if err := step(ctx, second, "second", kgo.TryCommit); err != nil {
		return err
	}
	err = step(ctx, first, "zombie", kgo.TryCommit)
	if !errors.Is(err, kerr.InvalidProducerEpoch) && !errors.Is(err, kerr.ProducerFenced) {
		return fmt.Errorf("the first producer was not fenced: %v", err)
	}
	return nil
}

func copied(ctx context.Context, bootstrap, source, target string, wanted int) error {
	session, err := kgo.NewGroupTransactSession(
		kgo.SeedBrokers(bootstrap),
		kgo.TransactionalID(target+"-id"),
		kgo.ConsumerGroup(target+"-group"),
		kgo.ConsumeTopics(source),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
		kgo.RecordPartitioner(kgo.ManualPartitioner()),
		kgo.RequireStableFetchOffsets(),
	)
	if err != nil {
		return err
	}
	defer session.Close()
	for turn, done := 1, 0; done < wanted; turn++ {
		fetches := session.PollRecords(ctx, 100)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("after %d of %d records: %w", done, wanted, err)
		}
		if fetches.NumRecords() == 0 {
			continue
		}
		if err := session.Begin(); err != nil {
			return err
		}
		fetches.EachRecord(func(record *kgo.Record) {
			copy := &kgo.Record{Topic: target, Partition: record.Partition, Value: record.Value}
			session.Produce(ctx, copy, nil)
		})
		committed, err := session.End(ctx, turn%3 != 0)
		if err != nil {
			return err
		}
		if committed {
			done += fetches.NumRecords()
		}
	}
	return nil
}

func show(ctx context.Context, bootstrap, topic string, wanted int) error {
	client, err := kgo.NewClient(
		kgo.SeedBrokers(bootstrap),
		kgo.ConsumeTopics(topic),
		kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()),
	)
	if err != nil {
		return err
	}
	defer client.Close()
	found := map[int32][]string{}
	for seen := 0; seen < wanted; {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return fmt.Errorf("%d of %d records: %w", seen, wanted, err)
		}
		seen += fetches.NumRecords()
		fetches.EachRecord(func(record *kgo.Record) {
			found[record.Partition] = append(found[record.Partition], string(record.Value))
		})
	}
	for _, partition := range slices.Sorted(maps.Keys(found)) {
		for _, value := range found[partition] {
			fmt.Println(value)
		}
	}
	return nil
}
