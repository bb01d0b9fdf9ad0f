import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;

/**
 * Reads a topic as a queue: bootstrap, topic, group, mode (implicit or explicit), number of records to finish.
 *
 * In explicit mode the first word of a value says what becomes of the record: "release" lets go of it once, "reject"
 * rejects it, "renew" holds it for longer than its lock lasts and then accepts it, anything else accepts it. Prints
 * "value|delivery count" for each delivery, and "refused|..." for what a commit could not do.
 */
public class ShareReader {
    private static final Map<String, Integer> SEEN = new HashMap<>();

    public static void main(String[] args) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", args[0]);
        settings.put("group.id", args[2]);
        settings.put("share.acknowledgement.mode", args[3]);
        settings.put("key.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        settings.put("value.deserializer", "org.apache.kafka.common.serialization.StringDeserializer");
        boolean explicit = args[3].equals("explicit");
        int wanted = Integer.parseInt(args[4]);
        long deadline = System.currentTimeMillis() + 60_000;
        try (KafkaShareConsumer<String, String> consumer = new KafkaShareConsumer<>(settings)) {
            consumer.subscribe(List.of(args[1]));
            int done = 0;
            while (done < wanted && System.currentTimeMillis() < deadline) {
                for (ConsumerRecord<String, String> record : consumer.poll(Duration.ofMillis(500))) {
                    String delivery = record.value() + "|" + record.deliveryCount().orElse((short) 0);
                    int seen = SEEN.merge(delivery, 1, Integer::sum);
                    if (seen == 1)
                        System.out.println(delivery);
                    done += explicit ? decide(consumer, record, seen) : 1;
                }
                commit(consumer);
            }
        }
    }

    /** A renewed record comes back from the next poll, in the same delivery. */
    private static int decide(KafkaShareConsumer<String, String> consumer, ConsumerRecord<String, String> record,
                              int seen) throws InterruptedException {
        AcknowledgeType verdict = AcknowledgeType.ACCEPT;
        if (record.value().startsWith("release") && record.deliveryCount().orElse((short) 0) == 1)
            verdict = AcknowledgeType.RELEASE;
        else if (record.value().startsWith("reject"))
            verdict = AcknowledgeType.REJECT;
        else if (record.value().startsWith("renew") && seen < 5) {
            verdict = AcknowledgeType.RENEW;
            Thread.sleep(600);
        }
        consumer.acknowledge(record, verdict);
        return verdict == AcknowledgeType.RELEASE || verdict == AcknowledgeType.RENEW ? 0 : 1;
    }

    private static void commit(KafkaShareConsumer<String, String> consumer) {
        consumer.commitSync().forEach((partition, error) ->
            error.ifPresent(what -> System.out.println("refused|" + partition + " " + what)));
    }
}
